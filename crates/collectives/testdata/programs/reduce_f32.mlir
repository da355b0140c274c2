module @reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xf32>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<6xf32> {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xf32>) -> tensor<6xf32>
    %1 = stablehlo.compare EQ, %arg1, %arg2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = stablehlo.select %1, %0, %arg0 : tensor<i1>, tensor<6xf32>
    return %2 : tensor<6xf32>
  }
}
