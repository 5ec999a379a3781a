"""The values that every package shares: types, keys, distributions, sampling, trees and placement on devices."""
