"""Handwritten digits (scikit-learn's 8x8 images) with an eight-layer perceptron."""
