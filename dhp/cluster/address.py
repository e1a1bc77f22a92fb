"""Decides which Ray a run uses; imports no Ray."""

import os

LOCAL, RUNNING, CLIENT = "local", "auto", "ray://"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for what `ray job submit` starts


def chosen_address(asked: str) -> str:
    """`asked`, but for a run submitted as a Ray job the cluster that it was submitted to in place of one of its own."""
    return RUNNING if asked == LOCAL and SUBMITTED in os.environ else asked
