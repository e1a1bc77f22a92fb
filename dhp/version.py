"""The version of dhp, readable without the installed package."""

VERSION = "0.1.0"
