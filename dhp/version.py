"""The version of dhp, in the one place that needs no installed package."""

VERSION = "0.1.0"
