// The levels that every kernel is compiled for, and how a binding calls one.
//
// linear.h declares   TANDEM_KERNEL(linear, const LinearArguments&)
// linear.cpp defines  void tandem::TANDEM_LEVEL::linear(const LinearArguments&), compiled once per level
// a binding calls     TANDEM_CALL(level, linear, arguments)
#pragma once

#include <cstdint>
#include <stdexcept>

namespace tandem {

enum class Level : int64_t { avx2 = 1, avx512 = 2, avx512bf16 = 3 };

// The element type of weights, of what products read and of the cache.
enum class Type { f32, bf16 };

}  // namespace tandem

#define TANDEM_KERNEL(name, arguments) \
  namespace tandem::avx2 {             \
  void name(arguments);                \
  }                                    \
  namespace tandem::avx512 {           \
  void name(arguments);                \
  }                                    \
  namespace tandem::avx512bf16 {       \
  void name(arguments);                \
  }

#define TANDEM_CALL(level, name, arguments)                        \
  switch (static_cast<::tandem::Level>(level)) {                   \
    case ::tandem::Level::avx2:                                    \
      ::tandem::avx2::name(arguments);                             \
      break;                                                       \
    case ::tandem::Level::avx512:                                  \
      ::tandem::avx512::name(arguments);                           \
      break;                                                       \
    case ::tandem::Level::avx512bf16:                              \
      ::tandem::avx512bf16::name(arguments);                       \
      break;                                                       \
    default:                                                       \
      throw std::invalid_argument("no such level of the kernels"); \
  }
