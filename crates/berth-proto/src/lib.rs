//! Protobuf and gRPC types generated from `proto/`: CRI, CSI, DRA, device plugins, PodResources.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "generated from the published field tables")]
#![allow(clippy::all, clippy::too_many_lines, reason = "generated code")]

/// Metadata key of an `ExecSync` call: maximum bytes of each output. Other runtimes ignore it.
pub const OUTPUT_LIMIT: &str = "berth-output-limit";

/// Serializes the value of an environment variable as text.
fn as_text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

/// Container Runtime Interface, `runtime.v1`.
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// containerd's events service.
pub mod containerd_events {
    tonic::include_proto!("containerd.services.events.v1");
}

/// gRPC health checking protocol.
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// PodResources API, `v1`.
pub mod pod_resources {
    tonic::include_proto!("v1");
}

/// Local APIs of version `v1alpha1`: PodResources, Pods, and health of DRA devices.
pub mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// Kubelet plugin registration API, `v1`.
pub mod plugin_registration {
    tonic::include_proto!("pluginregistration");
}

/// Container Storage Interface, `csi.v1`.
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Device plugin API, `v1beta1`.
pub mod device_plugin {
    tonic::include_proto!("v1beta1");
}

/// API of dynamic resource allocation (DRA) drivers, `v1`.
pub mod dra_v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// API of dynamic resource allocation (DRA) drivers, `v1beta1`.
pub mod dra_v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// Profiles in `pprof` format.
pub mod profile {
    tonic::include_proto!("perftools.profiles");
}

/// Encoded `FileDescriptorSet` of the `core/v1` Pod, for its protobuf encoding.
pub const POD_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/core-v1-pod.bin"));
