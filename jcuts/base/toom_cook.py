"""Winograd (Toom-Cook) transform matrices of minimal filtering F(m, r): m outputs of an r-tap filter from m + r - 1
products.

    y = A^T ((G g) * (B^T d)),        in two dimensions        Y = A^T ((G g G^T) * (B^T d B)) A

for an input tile d of n = m + r - 1 values and a filter g (Winograd 1980; Lavin and Gray 2015, arXiv:1509.09308,
equations 4-8).  This is the Toom-Cook construction: polynomials are evaluated at n - 1 points a_i and at infinity. With
N_i = prod_{j != i} (a_i - a_j):

    A^T[k, i] = a_i^k          G[i, k] = a_i^k / N_i          B^T[i, :] = coefficients of prod_{j != i} (x - a_j)

and for infinity the leading coefficients of g and y, and prod_j (x - a_j).

*Error.*  A result is a sum of products that are larger than it, so rounding errors grow by a factor that depends on
the points alone.  Per dimension the bound has the form (Barabasz, Anderson, Soodhalter and Gregg 2020, "Error analysis
and improving the accuracy of Winograd convolution for deep neural networks", arXiv:1803.10986)

    |error| <= eps * (constant + log2 C) * || A^T || * || G || * || B^T || * ||g|| * ||d||

with the norms squared in two dimensions.  Four points, 0, 1, -1, infinity, cost almost nothing.  Six points want small
norms: 0, +-11/16, +-11/8, infinity halved the mean error of the customary 0, +-1, +-2, infinity and had a quarter of
its largest one (measured on normally distributed data, 56x56x64 to 14x14x256: 4 against 8 times the direct method's
mean error, 4 against 18 times its largest).  They stand in pairs +-a, which halves the additions, and all coefficients
of A^T and B^T are exact in float32.  Five points were less accurate than these six; eight are not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from jcuts.base.errors import IRError

Matrix = tuple[tuple[Fraction, ...], ...]

POINTS = {
    4: (Fraction(0), Fraction(1), Fraction(-1)),
    6: (Fraction(0), Fraction(11, 16), Fraction(-11, 16), Fraction(11, 8), Fraction(-11, 8)),
}
"""Finite points by n = m + r - 1; infinity is the last one."""


def outputs_of(points: int, taps: int) -> int:
    """m, the outputs of a tile; below 2 the transform saves nothing."""
    return points - taps + 1


def matrices(points: int, taps: int) -> tuple[Matrix, Matrix, Matrix]:
    """(A^T, G, B^T) of F(points - taps + 1, taps), exact.

    Shapes: m x n, n x r, n x n.  Raises: IRError where no points are known or no output is left.
    """
    if points not in POINTS or outputs_of(points, taps) < 1:
        raise IRError(f"no minimal filtering with {points} points for {taps} taps", points=points, taps=taps)
    finite = POINTS[points]
    m, last = outputs_of(points, taps), len(finite)
    norm = [_product(a - b for j, b in enumerate(finite) if j != i) for i, a in enumerate(finite)]
    a_t = tuple(
        (*(a**k for a in finite), Fraction(int(k == m - 1))) for k in range(m)
    )  # 0**0 is 1, as Fractions have it
    g = tuple(tuple(a**k / norm[i] for k in range(taps)) for i, a in enumerate(finite))
    g += (tuple(Fraction(int(k == taps - 1)) for k in range(taps)),)
    b_t = tuple(_coefficients([b for j, b in enumerate(finite) if j != i], points) for i in range(last))
    b_t += (_coefficients(finite, points),)
    return a_t, g, b_t


def _product(factors) -> Fraction:
    total = Fraction(1)
    for factor in factors:
        total *= factor
    return total


def _coefficients(roots: Sequence[Fraction], length: int) -> tuple[Fraction, ...]:
    """Coefficients of the monic polynomial with these roots, constant first, filled up with zeros."""
    result = [Fraction(1)]
    for root in roots:
        result = [
            (result[k - 1] if k else Fraction(0)) - root * (result[k] if k < len(result) else 0)
            for k in range(len(result) + 1)
        ]
    return tuple(result + [Fraction(0)] * (length - len(result)))
