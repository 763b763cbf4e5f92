//! Fuzz targets: static pod manifests of files and HTTP.

use berth::{
    runtime::request::{container, ports},
    sources::{
        defaults,
        manifest_decoder::{self, Manifest},
        references::ReferenceRule,
        static_pod::{self, ManifestOrigin},
    },
};
use berth_types::{
    Pod, PodSource, api, env,
    hostname::HostName,
    qos::Qos,
    resource_state,
    resources::{self, Overhead},
};

use super::{runtimes::bounded_dns, text};

/// A static pod manifest file.
pub fn manifest_file(data: &[u8]) {
    let origin = ManifestOrigin {
        source: PodSource::File,
        location: "/etc/manifests/web.yaml",
        node_name: "Node-1",
        references: ReferenceRule::RefuseAll,
    };
    match manifest_decoder::decode(data) {
        Ok(Manifest::Pod(pod)) => become_static(*pod, origin),
        Ok(Manifest::List(_)) => {}
        Err(error) => drop(error.to_string()),
    }
}

/// The response of a manifest URL: a pod or a list.
pub fn manifest_http(data: &[u8]) {
    let origin = ManifestOrigin {
        source: PodSource::Http,
        location: "http://manifests/pods",
        node_name: "node-1",
        references: ReferenceRule::RefuseUnusable,
    };
    match manifest_decoder::decode(data) {
        Ok(Manifest::Pod(pod)) => become_static(*pod, origin),
        Ok(Manifest::List(pods)) => pods.into_iter().for_each(|pod| become_static(pod, origin)),
        Err(error) => drop(error.to_string()),
    }
}

/// A decoded manifest survives a round trip, defaulting is idempotent, and every later stage can process an accepted
/// pod.
fn become_static(pod: api::Pod, origin: ManifestOrigin<'_>) {
    let mut defaulted = pod.clone();
    defaults::apply(&mut defaulted);
    let mut again = defaulted.clone();
    defaults::apply(&mut again);
    assert_eq!(defaulted, again, "defaults are idempotent");
    let made = match static_pod::static_pod(pod.clone(), origin) {
        Ok(made) => made,
        Err(error) => return drop(error.to_string()),
    };
    assert_eq!(static_pod::static_pod(pod, origin).as_ref(), Ok(&made), "the same bytes make the same pod");
    let written = serde_json::to_vec(&made).expect("API objects serialise");
    match manifest_decoder::decode(&written) {
        Ok(Manifest::Pod(read)) => assert_eq!(*read, made, "written and read"),
        other => panic!("{other:?} from {}", text(&written)),
    }
    serve(&Pod::new(made).expect("an accepted pod has identity and specification"));
}

/// Runs the pure stages behind admission.
fn serve(pod: &Pod) {
    drop((Qos::of(pod), ports::of_pod(pod), container::pod_labels(pod)));
    drop((
        resources::pod_requests(pod.spec(), Overhead::Included),
        resources::pod_limits(pod.spec(), Overhead::Included),
    ));
    bounded_dns(pod, None);
    if let Ok(name) = HostName::of(pod, "cluster.local") {
        assert!(name.name.len() <= 63 && name.kernel_name(true).map_or(0, |n| n.len()) <= 64);
    }
    let state = resource_state::PodResources::of(pod);
    assert!(!state.differs_from(pod) && state.applied_to(pod).is_none());
    pod.containers().iter().for_each(|one| drop(env::references(one)));
}
