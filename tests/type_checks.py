"""The type checker of the test run: a whole number may stand where a float is asked for, as in Python."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
