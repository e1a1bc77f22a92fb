"""How many patches a second do three layouts take, by the length of a picture?"""
