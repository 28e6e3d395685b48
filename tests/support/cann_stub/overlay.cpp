// torch-npu's compute kernels need CANN's operators, which the stub lacks: here the CPU's kernels
// replace them, on the same bytes. torch-npu's own parts remain: creating, viewing, copying and
// freeing tensors, its allocator, streams and events.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

namespace {
using at::Tensor;
using c10::IValue;
constexpr auto NPU = c10::DeviceType::PrivateUse1;

Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != NPU) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  if (elements == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* start = const_cast<void*>(tensor.storage().data());
  Tensor seen = at::for_blob(start, {elements}).options(options).make_tensor();
  seen = seen.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return seen;
}

Tensor to_npu(const Tensor& made, c10::Device device) {
  if (!made.defined() || made.device().type() == NPU) return made;
  Tensor copied = at::empty_strided(made.sizes(), made.strides(), made.options().device(device));
  if (made.numel()) as_cpu(copied).copy_(made);
  return copied;
}

// Ops that may mix devices on a real NPU, too: copies, and indices in host memory.
bool may_mix(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
         name.find("copy") != std::string::npos;
}

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  std::optional<c10::Device> device, other;
  std::vector<std::pair<const c10::AliasInfo*, Tensor>> written;
  std::vector<std::pair<Tensor, Tensor>> resized;

  Tensor lower(const Tensor& tensor, const c10::AliasInfo* alias) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != NPU) {
      if (tensor.dim() > 0) other = tensor.device();  // a scalar may come from the host
      return tensor;
    }
    if (!device) device = tensor.device();
    if (device != tensor.device()) other = tensor.device();
    if (!alias || !alias->isWrite()) return as_cpu(tensor);
    written.emplace_back(alias, tensor);
    if (tensor.numel()) return as_cpu(tensor);
    const auto options = tensor.options().device(at::kCPU);
    resized.emplace_back(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
    return resized.back().second;  // the kernel resizes it
  }

  void lower_all() {
    const auto& arguments = op.schema().arguments();
    const size_t base = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = (*stack)[base + i];
      if (value.isTensor()) {
        value = lower(value.toTensor(), arguments[i].alias_info());
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& each : list) each = lower(each, nullptr);
        value = IValue(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (auto& each : value.toOptionalTensorVector()) {
          list.push_back(each ? std::optional<Tensor>(lower(*each, nullptr)) : std::nullopt);
        }
        value = IValue(list);
      } else if (value.isDevice() && value.toDevice().type() == NPU) {
        device = value.toDevice();
        value = IValue(c10::Device(at::kCPU));
      }
    }
    const auto name = c10::toString(op.operator_name());
    TORCH_CHECK(!device || !other || may_mix(name),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", *other, "! (in ", name, ")");
  }

  void lift_all() {
    for (auto& [ours, made] : resized) {
      ours.resize_(made.sizes());
      if (made.numel()) as_cpu(ours).copy_(made);
    }
    const auto& returns = op.schema().returns();
    const size_t base = stack->size() - returns.size();
    for (size_t i = 0; i < returns.size(); i++) {
      auto& value = (*stack)[base + i];
      if (value.isTensor()) {
        value = lift(value.toTensor(), returns[i].alias_info());
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& each : list) each = to_npu(each, *device);
        value = IValue(list);
      }
    }
  }

  Tensor lift(const Tensor& made, const c10::AliasInfo* alias) {
    if (!device) return made;
    for (auto& [theirs, tensor] : written) {
      if (alias && alias->isWrite() && theirs->afterSets() == alias->afterSets()) return tensor;
    }
    return to_npu(made, *device);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, stack, {}, {}, {}, {}};
  call.lower_all();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.lift_all();
}

// Replaces every aten op except for those named; returns how many.
int64_t take_over(at::ArrayRef<std::string> kept) {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;
  const std::set<std::string> keep(kept.begin(), kept.end());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || keep.count(c10::toString(name)) || !op ||
        !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const auto& returns = op->schema().returns();
    const bool is_view = std::any_of(returns.begin(), returns.end(), [](const auto& each) {
      return each.alias_info() && !each.alias_info()->isWrite();
    });
    if (is_view) continue;
    registrations->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), std::nullopt, nullptr,
        "stub of CANN"));
  }
  return static_cast<int64_t>(registrations->size());
}
}  // namespace

TORCH_LIBRARY(cann_stub, m) {
  m.def("take_over(str[] kept) -> int", [](c10::List<std::string> kept) {
    return take_over(std::vector<std::string>(kept.begin(), kept.end()));
  });
  m.def("as_cpu(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return as_cpu(tensor); });
  m.def("to_npu(Tensor tensor, int index) -> Tensor", [](const Tensor& tensor, int64_t index) {
    return to_npu(tensor, c10::Device(NPU, static_cast<c10::DeviceIndex>(index)));
  });
}
