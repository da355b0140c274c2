module @reduce_scatter attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<12xf32>) -> tensor<3xf32> {
    %0 = stablehlo.reshape %arg0 : (tensor<12xf32>) -> tensor<4x3xf32>
    %1 = stablehlo.constant dense<[0, 2, 1, 3]> : tensor<4xi32>
    %2 = "stablehlo.gather"(%0, %1) {dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 3>} : (tensor<4x3xf32>, tensor<4xi32>) -> tensor<4x3xf32>
    %3 = stablehlo.reshape %2 : (tensor<4x3xf32>) -> tensor<12xf32>
    %4 = "stablehlo.reduce_scatter"(%3) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, scatter_dimension = 0 : i64, use_global_device_ids} : (tensor<12xf32>) -> tensor<6xf32>
    %5 = "stablehlo.reduce_scatter"(%4) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>, scatter_dimension = 0 : i64, use_global_device_ids} : (tensor<6xf32>) -> tensor<3xf32>
    return %5 : tensor<3xf32>
  }
}
