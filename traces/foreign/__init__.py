"""Files of other people: text and Parquet with limits on size, and tables that users have written themselves."""
