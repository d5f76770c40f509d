"""Installing, upgrading and removing the job of launchd."""
