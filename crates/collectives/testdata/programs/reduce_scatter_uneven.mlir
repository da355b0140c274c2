module @reduce_scatter attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xf32>) -> tensor<3xf32> {
    %0 = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.slice %arg0 [0:2] : (tensor<6xf32>) -> tensor<2xf32>
    %2 = stablehlo.pad %1, %0, low = [0], high = [1], interior = [0] : (tensor<2xf32>, tensor<f32>) -> tensor<3xf32>
    %3 = stablehlo.slice %arg0 [2:2] : (tensor<6xf32>) -> tensor<0xf32>
    %4 = stablehlo.pad %3, %0, low = [0], high = [3], interior = [0] : (tensor<0xf32>, tensor<f32>) -> tensor<3xf32>
    %5 = stablehlo.slice %arg0 [2:5] : (tensor<6xf32>) -> tensor<3xf32>
    %6 = stablehlo.slice %arg0 [5:6] : (tensor<6xf32>) -> tensor<1xf32>
    %7 = stablehlo.pad %6, %0, low = [0], high = [2], interior = [0] : (tensor<1xf32>, tensor<f32>) -> tensor<3xf32>
    %8 = stablehlo.concatenate %2, %4, %5, %7, dim = 0 : (tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) -> tensor<12xf32>
    %9 = "stablehlo.reduce_scatter"(%8) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, scatter_dimension = 0 : i64, use_global_device_ids} : (tensor<12xf32>) -> tensor<3xf32>
    return %9 : tensor<3xf32>
  }
}
