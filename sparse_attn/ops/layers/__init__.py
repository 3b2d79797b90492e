"""What a whole model needs around attention: products, router, rope, hyper connections, sampling."""
