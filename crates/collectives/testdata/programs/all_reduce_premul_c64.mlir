module @all_reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xcomplex<f32>>, %arg1: tensor<f32>) -> tensor<6xcomplex<f32>> {
    %0 = stablehlo.real %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %1 = stablehlo.reshape %0 : (tensor<6xf32>) -> tensor<1x6xf32>
    %2 = stablehlo.imag %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %3 = stablehlo.reshape %2 : (tensor<6xf32>) -> tensor<1x6xf32>
    %4 = stablehlo.concatenate %1, %3, dim = 1 : (tensor<1x6xf32>, tensor<1x6xf32>) -> tensor<1x12xf32>
    %5 = stablehlo.reshape %4 : (tensor<1x12xf32>) -> tensor<12xf32>
    %6 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f32>) -> tensor<12xf32>
    %7 = stablehlo.multiply %5, %6 : tensor<12xf32>
    %8 = "stablehlo.all_reduce"(%7) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<12xf32>) -> tensor<12xf32>
    %9 = stablehlo.slice %8 [0:6] : (tensor<12xf32>) -> tensor<6xf32>
    %10 = stablehlo.slice %8 [6:12] : (tensor<12xf32>) -> tensor<6xf32>
    %11 = stablehlo.complex %9, %10 : tensor<6xcomplex<f32>>
    return %11 : tensor<6xcomplex<f32>>
  }
}
