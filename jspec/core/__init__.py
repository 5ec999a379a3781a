"""The values that every room shares: types, keys, distributions, sampling, trees and placement on devices."""
