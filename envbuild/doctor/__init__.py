"""What this host has, what each artifact can and cannot do on it, and whether a site file is right."""
