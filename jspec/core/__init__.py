"""Code that all packages share: types, random keys, distributions, sampling, trees and device placement."""
