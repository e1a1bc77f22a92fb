"""Files behind addresses (s3://, gs://, hf://, http://), read through a cache on the local disk."""
