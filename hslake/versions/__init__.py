"""What a lake's versions are made of: history, removal of what no version needs, deletion for good,
and mending of a torn log. One job a module."""

from hslake.versions.deletion import DeleteReport, delete
from hslake.versions.history import log
from hslake.versions.repairing import RepairReport, repair
from hslake.versions.vacuuming import VacuumReport, vacuum

__all__ = ["DeleteReport", "RepairReport", "VacuumReport", "delete", "log", "repair", "vacuum"]
