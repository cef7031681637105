"""Families of scenarios: distributions over clusters, jobs, starts and conditions, whose members are drawn by number."""

from harness.families.families import FAMILIES, audience, family_of, member_name, members, single

__all__ = ["FAMILIES", "audience", "family_of", "member_name", "members", "single"]
