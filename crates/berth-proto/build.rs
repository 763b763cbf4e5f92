//! Compiles `proto/*.proto` with protox, so that no protoc is needed.

use std::{env, error::Error, fs, path::PathBuf};

use protox::prost::Message;

/// Protocols in use; each is added together with the code that uses it.
const PROTOS: &[&str] = &[
    "cri-v1",
    "containerd-events-v1",
    "grpc-health-v1",
    "podresources-v1",
    "podresources-v1alpha1",
    "pods-v1alpha1",
    "profile",
    "pluginregistration-v1",
    "csi-v1",
    "deviceplugin-v1beta1",
    "dra-v1",
    "dra-v1beta1",
    "dra-health-v1alpha1",
];
/// CRI messages that are shown to users as JSON: sandbox and container configurations.
const SHOWN: &[&str] = &[
    "CDIDevice",
    "Capability",
    "ContainerConfig",
    "ContainerMetadata",
    "DNSConfig",
    "Device",
    "HugepageLimit",
    "IDMapping",
    "ImageSpec",
    "Int64Value",
    "KeyValue",
    "LinuxContainerConfig",
    "LinuxContainerResources",
    "LinuxContainerSecurityContext",
    "LinuxPodSandboxConfig",
    "LinuxSandboxSecurityContext",
    "Mount",
    "NamespaceOption",
    "PodSandboxConfig",
    "PodSandboxMetadata",
    "PortMapping",
    "SELinuxOption",
    "SecurityProfile",
    "UserNamespace",
    "WindowsContainerConfig",
    "WindowsContainerResources",
    "WindowsContainerSecurityContext",
    "WindowsCpuGroupAffinity",
    "WindowsNamespaceOption",
    "WindowsPodSandboxConfig",
    "WindowsSandboxSecurityContext",
];
/// Read as a descriptor table at run time; no Rust types are generated.
const TABLE: &str = "core-v1-pod";

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let files: Vec<PathBuf> = PROTOS.iter().map(|name| root.join(format!("{name}.proto"))).collect();
    let descriptors = protox::compile(&files, [&root])?;
    let mut generated = tonic_prost_build::configure().build_server(true).build_client(true).bytes(".v1alpha1");
    for message in SHOWN {
        generated = generated.type_attribute(format!(".runtime.v1.{message}"), "#[derive(serde::Serialize)]");
    }
    let as_text = "#[serde(serialize_with = \"crate::as_text\")]";
    generated.field_attribute(".runtime.v1.KeyValue.value", as_text).compile_fds(descriptors)?;
    let mut table = protox::compile([root.join(format!("{TABLE}.proto"))], [&root])?;
    table.file.iter_mut().for_each(|file| file.source_code_info = None);
    let table_path = PathBuf::from(env::var("OUT_DIR")?).join(format!("{TABLE}.bin"));
    fs::write(table_path, table.encode_to_vec())?;
    Ok(())
}
