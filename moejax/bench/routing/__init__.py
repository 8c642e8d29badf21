"""The routing experiment: traces analysed side by side, and traces made up."""
