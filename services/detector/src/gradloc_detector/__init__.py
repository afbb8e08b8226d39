"""Folds the steps of training runs into incidents and limits, and dispatches localizations."""
