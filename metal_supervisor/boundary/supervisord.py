"""The name by which an earlier release starts supervisord; a foreground process of it still does."""

from metal_supervisor.supervisord.client import daemon

if __name__ == "__main__":
    daemon()
