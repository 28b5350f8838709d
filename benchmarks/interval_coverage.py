"""
How often 95 % intervals contain the true mean score, for questions with several samples.

    python benchmarks/interval_coverage.py

Mean scores of 0.02 to 0.98, 1 to 8 samples of 30 to 300 questions: 140 cases. All questions are equally hard, or their
difficulty has a U-shaped (beta) distribution. Prints the least and the mean coverage, the cases below 93 %, and the
width relative to a normal interval with the true deviation.
"""

import argparse
import itertools

from marft_trl.reporting import interval

import numpy as np


MEANS, SAMPLES, QUESTIONS = (0.02, 0.05, 0.1, 0.5, 0.9, 0.95, 0.98), (1, 2, 4, 8), (30, 50, 100, 200, 300)


def scores(draws, mean, samples, questions, spread):
    chances = np.full(questions, mean) if not spread else draws.beta(2 * mean, 2 * (1 - mean), questions)
    return draws.binomial(samples, chances) / samples


def deviation(mean, samples, spread):
    """Of the score of one question: of its chance, and of its samples."""
    of_chance = mean * (1 - mean) / 3 if spread else 0.0
    return (of_chance + (mean * (1 - mean) - of_chance) / samples) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    print("| questions are | least coverage | mean coverage | cases below 93 % | width / normal |")
    print("|---|---|---|---|---|")
    for spread in (False, True):
        coverages, widths, below = [], [], []
        for number, case in enumerate(itertools.product(MEANS, SAMPLES, QUESTIONS)):
            mean, samples, questions = case
            draws, covered, width = np.random.default_rng(number), 0, 0.0
            for run in range(options.runs):
                bounds = interval(scores(draws, *case, spread), seed=run, n_resamples=1000)
                covered += bounds.low <= mean <= bounds.high
                width += (bounds.high - bounds.low) / options.runs
            coverages.append(covered / options.runs)
            widths.append(width / (2 * 1.96 * deviation(mean, samples, spread) / questions**0.5))
            below += [(*case, covered / options.runs)] * (covered / options.runs < 0.93)
        kind = "of many difficulties" if spread else "equally hard"
        print(
            f"| {kind} | {min(coverages):.1%} | {np.mean(coverages):.1%} | {below or 'none'} | {np.mean(widths):.2f} |"
        )


if __name__ == "__main__":
    main()
