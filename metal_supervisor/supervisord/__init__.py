"""supervisord: its XML-RPC client, its logs, and the plugin of supervisorctl."""
