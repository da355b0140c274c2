module @reduce_scatter attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xcomplex<f32>>) -> tensor<3xcomplex<f32>> {
    %0 = stablehlo.real %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %1 = stablehlo.reshape %0 : (tensor<6xf32>) -> tensor<2x3xf32>
    %2 = stablehlo.imag %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %3 = stablehlo.reshape %2 : (tensor<6xf32>) -> tensor<2x3xf32>
    %4 = stablehlo.concatenate %1, %3, dim = 1 : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x6xf32>
    %5 = stablehlo.reshape %4 : (tensor<2x6xf32>) -> tensor<12xf32>
    %6 = "stablehlo.reduce_scatter"(%5) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, scatter_dimension = 0 : i64, use_global_device_ids} : (tensor<12xf32>) -> tensor<6xf32>
    %7 = stablehlo.slice %6 [0:3] : (tensor<6xf32>) -> tensor<3xf32>
    %8 = stablehlo.slice %6 [3:6] : (tensor<6xf32>) -> tensor<3xf32>
    %9 = stablehlo.complex %7, %8 : tensor<3xcomplex<f32>>
    return %9 : tensor<3xcomplex<f32>>
  }
}
