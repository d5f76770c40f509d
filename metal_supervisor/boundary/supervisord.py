"""The name by which an earlier release starts supervisord; a foreground process of it still does."""

from metal_supervisor.supervisord.daemon import main

if __name__ == "__main__":
    main()
