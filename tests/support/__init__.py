"""What tests stand on: a whole system, real and played parts, stand-ins for engines."""
