// An Ascend NPU in host memory, as a PrivateUse1 device of torch: its registrations.
#include <torch/library.h>

#include "fallback.h"
#include "tensors.h"

namespace emulation {

REGISTER_ALLOCATOR(NPU, &device_allocator());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

static const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks());
  return true;
}();

static int64_t format_of(const Tensor& tensor) {
  const Block* block = books().find(tensor.storage().data());
  return block ? block->format : FORMAT_ND;
}

}  // namespace emulation

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &emulation::empty);
  m.impl("empty_strided", &emulation::empty_strided);
  m.impl("as_strided", &emulation::as_strided);
  m.impl("view", &emulation::view);
  m.impl("_reshape_alias", &emulation::reshape_alias);
  m.impl("unfold", &emulation::unfold);
  m.impl("resize_", &emulation::resize_);
  m.impl("set_.source_Storage_storage_offset", &emulation::set_storage);
  m.impl("set_.source_Storage", &emulation::set_whole_storage);
  m.impl("set_.source_Tensor", &emulation::set_tensor);
  m.impl("copy_", &emulation::copy_);
  m.impl("_copy_from", &emulation::copy_from);
  m.impl("_copy_from_and_resize", &emulation::copy_from_and_resize);
  m.impl("_local_scalar_dense", &emulation::local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulation::run_on_cpu>());
}

// Functions for the Python side of the emulation.
TORCH_LIBRARY(npu_emulation, m) {
  m.def("register_fallbacks() -> int", &emulation::register_fallbacks);
  m.def("device_count() -> int", [] { return int64_t{emulation::num_devices()}; });
  m.def("current_device() -> int", [] { return int64_t{emulation::current_device}; });
  m.def("set_device(int index) -> ()", [](int64_t index) {
    emulation::Guard().setDevice({emulation::NPU, static_cast<c10::DeviceIndex>(index)});
  });
  m.def("used_bytes(int index) -> int", [](int64_t index) { return emulation::books().used(index); });
  m.def("peak_bytes(int index) -> int", [](int64_t index) { return emulation::books().peak(index); });
  m.def("total_bytes() -> int", [] { return emulation::capacity(); });
  m.def("reset_peak(int index) -> ()", [](int64_t index) { emulation::books().reset_peak(index); });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    for (int i = 0; i < emulation::num_devices(); i++) {
      emulation::default_generator(i).set_current_seed(seed);
    }
  });
  m.def("watch_waits(bool are_watched) -> str[]", &emulation::watch_waits);
  m.def("as_cpu(Tensor tensor) -> Tensor", [](const at::Tensor& t) { return emulation::as_cpu(t); });
  m.def("to_npu(Tensor tensor, int index) -> Tensor", [](const at::Tensor& t, int64_t index) {
    return emulation::to_npu(t, c10::Device(emulation::NPU, static_cast<c10::DeviceIndex>(index)));
  });
  m.def("format_of(Tensor tensor) -> int",
        [](const at::Tensor& t) { return emulation::format_of(t); });
  m.def("set_format(Tensor(a!) tensor, int format) -> ()", [](const at::Tensor& t, int64_t format) {
    emulation::books().set_format(t.storage().data(), format);
  });
}
