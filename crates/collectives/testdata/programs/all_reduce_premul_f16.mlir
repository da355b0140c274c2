module @all_reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xf16>, %arg1: tensor<f32>) -> tensor<6xf16> {
    %0 = stablehlo.convert %arg0 : (tensor<6xf16>) -> tensor<6xf32>
    %1 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f32>) -> tensor<6xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<6xf32>
    %3 = "stablehlo.all_reduce"(%2) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xf32>) -> tensor<6xf32>
    %4 = stablehlo.convert %3 : (tensor<6xf32>) -> tensor<6xf16>
    return %4 : tensor<6xf16>
  }
}
