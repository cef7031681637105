"""From the scores of a comparison to tables, figures and pages."""
