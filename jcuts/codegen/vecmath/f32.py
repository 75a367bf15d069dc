"""float32 constants and minimax polynomial coefficients (generated).

The polynomials are the output of ``benchmarks/vecmath/fit_polynomials.py f32``: its table says what each fits, on which
interval; the comments give the largest weighted error of the rounded coefficients.
"""

from jcuts.codegen.llvm.lanes import F32 as ELEMENT
from jcuts.codegen.vecmath.formats import Format, Table

POLYNOMIALS: dict[str, Table] = {
    # weighted error 2^-31.0
    "EXP": (0.5, 0.166666657, 0.0416664667, 0.0083336439, 0.00139351026, 0.000196644804),
    # weighted error 2^-27.5
    "EXP2": (1, 0.693147242, 0.240226552, 0.0555027276, 0.0096170688, 0.00134180265, 0.000158175433),
    # weighted error 2^-27.2
    "LOG": (
        0.333333313,
        -0.250008225,
        0.200012609,
        -0.166233301,
        0.142008856,
        -0.131593853,
        0.127668813,
        -0.0764291137,
    ),
    # weighted error 2^-34.2
    "ATANH2": (0.666666627, 0.400009453, 0.285020918, 0.241889477),
    # weighted error 2^-41.4
    "ATANH2_TAIL": (0.399999976, 0.285720199, 0.221756265, 0.19641979),
    # weighted error 2^-27.9
    "SIN": (-0.166666552, 0.00833218731, -0.000195178975),
    # weighted error 2^-32.3
    "COS": (0.041666653, -0.00138876098, 2.44617495e-05),
    # weighted error 2^-31.6
    "SINH": (0.166666672, 0.00833331048, 0.000198428956, 2.78221205e-06),
    # weighted error 2^-27.6
    "ASIN": (0.166667521, 0.0749530643, 0.0454697683, 0.0241808109, 0.0421663187),
    # weighted error 2^-30.4
    "ATAN": (-0.333333164, 0.199985266, -0.142443448, 0.105987288, -0.0608874075),
    # weighted error 2^-26.1
    "ERF": (0.128379151, -0.376125038, 0.112819217, -0.026770493, 0.0049989596, -0.000602080545),
    # weighted error 2^-27.4
    "ERF_TAIL": (
        1.00023508,
        -0.142319709,
        -0.0666897744,
        -0.00587382028,
        0.00955155492,
        -0.00125497777,
        -8.75979895e-05,
        1.94315799e-05,
    ),
    # weighted error 2^-24.6
    "ERFC": (
        1.02158272,
        -0.687160611,
        0.279470474,
        -0.0364436172,
        -0.0214868542,
        0.00648225518,
        0.00296824332,
        -0.000820582558,
        -0.000425168721,
    ),
    # weighted error 2^-23.0
    "ERFINV_0": (
        1.50140941,
        0.246640652,
        -0.00417765416,
        -0.00125354587,
        0.000218557936,
        -4.49183744e-06,
        -3.51669246e-06,
        3.64541791e-07,
        2.74360552e-08,
        -1.54300839e-09,
    ),
    # weighted error 2^-24.8
    "ERFINV_1": (
        2.83297682,
        1.00167477,
        0.00944427401,
        -0.00763404369,
        0.00569564477,
        -0.00361310365,
        0.00146218913,
        -2.50548946e-05,
        -0.000290644035,
        9.28172449e-05,
    ),
    # constants in parts: 2/3; ln 2 with a first part of 16 bits
    "TWO_THIRDS": (0.666666687, -1.98682155e-08),
    "LN2_SHORT": (0.693145752, 1.42860677e-06),
    # erf: where its first polynomial ends
    "ERF_CUT": (0.9,),
    # erfc: the pole of its variable, and where it is zero
    "ERFC_POLE": (2.0,),
    "ERFC_ZERO": (10.2,),
    # erf_inv: centre and end of the first interval in w; centres and ends of the others in sqrt(w) and w
    "ERFINV_NEAR": (2.5, 5.0),
    "ERFINV_CENTRES": (3.0,),
    "ERFINV_LIMITS": (),
}

F32 = Format(
    name="float32",
    element=ELEMENT,
    mantissa=23,
    bias=127,
    smallest_normal=2.0**-126,
    ln2=(0.693147182, -1.90465421e-09),
    log2_e=1.44269502,
    pi_half=(1.57079637, -4.37113883e-08, -1.71512451e-15),
    exp_range=(-104.0, 90.0),
    exp2_range=(-151.0, 129.0),
    one_above=9.02,
    trig_fast=2.0**20,
    sqrt_half_bits=0x3F3504F3,
    polynomials=POLYNOMIALS,
)
