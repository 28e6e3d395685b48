"""Conformance suites and test tools with which third parties test their own plugins."""
