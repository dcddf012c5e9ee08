"""The report: receipts, and the artifacts beside them, as one HTML page."""
