"""What runs inside a rank: it records and never judges. Only the launched process imports it, and with it torch."""
