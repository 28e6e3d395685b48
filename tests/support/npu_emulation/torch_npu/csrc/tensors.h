// The ops that a device must implement itself: creating, viewing and copying tensors.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "device.h"
#include "waits.h"

namespace emulation {

using at::IntArrayRef;
using std::optional;

inline Tensor empty(IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout>,
                    optional<at::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::named(device.value_or(c10::Device(NPU, -1))));
  return at::detail::empty_generic(sizes, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> dtype,
                            optional<at::Layout>, optional<at::Device> device, optional<bool>) {
  c10::DeviceGuard guard(Guard::named(device.value_or(c10::Device(NPU, -1))));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides,
                         optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes,
                            c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}
inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

inline void make_room(const Tensor& tensor) {
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() && tensor.storage().nbytes() < needed) {
    hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
}

inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes,
                             optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  make_room(self);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset,
                           c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  }
  make_room(self);
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {c10::SymInt(elements)}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

inline void require_reachable(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == NPU || tensor.device().is_cpu(),
              "an npu copies to and from the host and npus, not ", tensor.device());
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool is_async) {
  require_reachable(self);
  require_reachable(source);
  note_copy(self, source, is_async);
  as_cpu(self).copy_(as_cpu(source));
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& target, bool is_async) {
  Tensor out = target;
  return copy_(out, self, is_async);
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}
inline at::Scalar local_scalar(const Tensor& self) {
  note_wait("a number is read");
  return as_cpu(self).item();
}

}  // namespace emulation
