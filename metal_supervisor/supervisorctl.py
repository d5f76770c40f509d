"""The module that supervisord's configuration names as the plugin of supervisorctl, in running systems too."""

from metal_supervisor.supervisord.ctl_plugin import make

__all__ = ["make"]
