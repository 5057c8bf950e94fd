"""Happenings: notices of changes in the ledger, live and replayed."""
