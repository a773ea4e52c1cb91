"""rpbench: which pipeline schedule trains a model fastest on given devices, and how do we know?"""
