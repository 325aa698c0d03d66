"""A person at a terminal: one small file per command. Only here anything prints or exits."""
