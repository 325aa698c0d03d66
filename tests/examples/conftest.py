from tests.cli.conftest import quiet_machine, run

__all__ = ["quiet_machine", "run"]
