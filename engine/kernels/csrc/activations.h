// The functions between a feed-forward layer's products, by vectors.
//
// Each is a fixed sequence of separately rounded operations and has the same bits in every lane. Errors are those found
// by tests/engine/kernels/test_cpp_linear.py against float64. A NaN stays one.
#pragma once

#include "lanes.h"
#include "linear.h"

namespace tandem::TANDEM_LEVEL {

inline Lanes with_sign_of(Lanes x, Lanes magnitude) {
  return select(less(x, zero()), sub(zero(), magnitude), magnitude);
}

inline Lanes sigmoid(Lanes x) { return div(fill(1.0f), add(fill(1.0f), exp(sub(zero(), x)))); }

// Below 0.625 the odd polynomial of Cephes' tanhf, so that small values keep their relative precision; above,
// 1 - 2 / (e^2|x| + 1).
inline Lanes tanh(Lanes x) {
  const Lanes size = abs(x);
  const Lanes square = mul(x, x);
  Lanes series = fill(-5.70498872745e-3f);
  series = fma(series, square, fill(2.06390887954e-2f));
  series = fma(series, square, fill(-5.37397155531e-2f));
  series = fma(series, square, fill(1.33314422036e-1f));
  series = fma(series, square, fill(-3.33332819422e-1f));
  const Lanes near = fma(mul(series, square), x, x);
  const Lanes far = sub(fill(1.0f), div(fill(2.0f), add(exp(add(size, size)), fill(1.0f))));
  return select(less(size, fill(0.625f)), near, with_sign_of(x, far));
}

// Two polynomials by N. Juffa (forums.developer.nvidia.com, "a faster and more accurate implementation of erff"):
// erf(x) = x + x·p(x²) below 475/512, 1 - e^q(|x|) above.
inline Lanes erf(Lanes x) {
  const Lanes size = abs(x);
  const Lanes square = mul(x, x);
  Lanes low = fill(-5.96761703e-4f);
  low = fma(low, square, fill(4.99119423e-3f));
  low = fma(low, square, fill(-2.67681349e-2f));
  low = fma(low, square, fill(1.12819925e-1f));
  low = fma(low, square, fill(-3.76125336e-1f));
  low = fma(low, square, fill(1.28379166e-1f));
  const Lanes near = fma(low, x, x);
  Lanes high = fma(fill(-1.72853470e-5f), size, fill(3.83197126e-4f));
  high = fma(high, square, fma(fill(-3.88396438e-3f), size, fill(2.42546219e-2f)));
  high = fma(high, size, fill(-1.06777877e-1f));
  high = fma(high, size, fill(-6.34846687e-1f));
  high = fma(high, size, fill(-1.28717512e-1f));
  high = fma(high, size, sub(zero(), size));
  const Lanes far = sub(fill(1.0f), exp(high));
  return select(less(size, fill(0.927734375f)), near, with_sign_of(x, far));
}

inline Lanes silu(Lanes x) { return div(x, add(fill(1.0f), exp(sub(zero(), x)))); }

inline Lanes gelu(Lanes x) {
  return mul(mul(fill(0.5f), x), add(fill(1.0f), erf(mul(x, fill(0.70710678f)))));
}

inline Lanes gelu_tanh(Lanes x) {
  const Lanes cube = mul(mul(x, x), x);
  const Lanes inner = mul(fill(0.79788456f), fma(fill(0.044715f), cube, x));
  return mul(mul(fill(0.5f), x), add(fill(1.0f), tanh(inner)));
}

inline Lanes relu(Lanes x) { return max(zero(), x); }  // in this order a NaN passes

inline Lanes activate(Activation activation, Lanes x) {
  switch (activation) {
    case Activation::silu:
      return silu(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::relu:
      return relu(x);
  }
  return x;
}

}  // namespace tandem::TANDEM_LEVEL
