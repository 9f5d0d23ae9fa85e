"""The parity report: report.json for programs, report.html for people, a summary for terminals."""
