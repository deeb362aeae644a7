"""What is wrong with how a draft was asked for."""

from __future__ import annotations


class Refused(ValueError):
    """A setting that can't be used."""

    def __init__(self, setting: str, reason: str) -> None:
        """`setting`: its name in `pipeline.Plan` or `training.Recipe`."""
        super().__init__(f"{setting}: {reason}")
        self.setting = setting
        self.reason = reason
