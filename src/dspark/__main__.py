"""`python -m dspark`, which launchers of several processes need."""

from dspark.cli.main import main

main()
