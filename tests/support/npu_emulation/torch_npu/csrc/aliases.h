// The same bytes seen as the CPU's and as the device's, without a copy.
#pragma once
#include "memory.h"

namespace emulation {

using at::Tensor;

inline Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != NPU) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.storage().nbytes() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  void* start = const_cast<void*>(tensor.storage().data());
  Tensor flat = at::for_blob(start, {elements}).options(options).make_tensor();
  Tensor seen = flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return seen;
}

// A CPU kernel's result as device memory: accounted to the device until it is freed.
struct Adopted {
  Tensor kept;
  void* address;
};

inline Tensor to_npu(const Tensor& made, c10::Device device) {
  if (!made.defined() || made.device().type() == NPU) return made;
  void* start = const_cast<void*>(made.storage().data());
  if (made.storage_offset() != 0 || start == nullptr || books().find(start)) {
    c10::DeviceGuard guard(device);
    Tensor copied = at::empty_strided(made.sizes(), made.strides(), made.options().device(device));
    if (made.numel()) as_cpu(copied).copy_(made);
    return copied;
  }
  books().require_room(made.storage().nbytes(), device.index());
  books().charge(start, made.storage().nbytes(), device.index());
  const auto drop = [](void* context) {
    auto* adopted = static_cast<Adopted*>(context);
    books().release(adopted->address);
    delete adopted;
  };
  at::DataPtr data(start, new Adopted{made, start}, drop, device);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t{}, made.storage().nbytes(),
                              std::move(data), &device_allocator(), /*resizable=*/true);
  Tensor adopted = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), made.dtype());
  adopted.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
  return adopted;
}

}  // namespace emulation
