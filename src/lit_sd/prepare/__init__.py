"""`lit-sd prepare` and `lit-sd inspect`: data is scanned, judged by named rules, packed and reported on."""
