// Buffers that start at a cache line: vectors and tiles that are loaded from them then lie in one line each.

#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace lookonce {

template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}

  T* allocate(std::size_t size) { return static_cast<T*>(::operator new(size * sizeof(T), kLine)); }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, kLine); }

  template <typename Other>
  bool operator==(const LineAllocator<Other>&) const {
    return true;
  }
  template <typename Other>
  bool operator!=(const LineAllocator<Other>&) const {
    return false;
  }
};

template <typename T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace lookonce
