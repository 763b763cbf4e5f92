//! Controllers: CSR approver and signer, garbage collector, namespace lifecycle, scheduler. Pure.
//!
//! Implements spec 10a §7.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    super::{
        resources::KINDS,
        view::{Caller, Change, DelayedJob, DeleteEffect, DeleteOptions, View, Write},
    },
    authorizer::{AccessAttributes, decide},
    csr, deletion,
    fields::{list, set, text, texts},
    pod_verbs,
};

const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";
/// Resources whose objects the garbage collector deletes with their owner Node.
const OWNED: &[&str] =
    &["leases.coordination.k8s.io", "csinodes.storage.k8s.io", "resourceslices.resource.k8s.io", "pods"];

/// Work item of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    /// Approve the certificate signing request with that name if the approver's rules allow it.
    Approve(String),
    /// Sign the approved certificate signing request with that name.
    Sign(String),
    /// Delete the objects whose owner is the Node with that UID.
    Collect(String),
    /// Create the root CA config map and the default service account in that namespace.
    Publish(String),
    /// Delete the content of that namespace, and then the namespace itself.
    Empty(String),
    /// Bind that pod (namespace, name) to the node of the settings.
    Bind(String, String),
}

/// Controller jobs for a change, with their delays.
pub fn react(view: &dyn View, change: &Change) -> Vec<DelayedJob> {
    let rules = view.rules();
    let later = |after: Option<Duration>, job: Job| after.map(|after| DelayedJob { after, job });
    let object = change.object();
    let name = text(object, "/metadata/name").to_owned();
    let is_new = change.before.is_none();
    let jobs = match (change.resource.as_str(), change.after.is_some()) {
        (CSRS, true) if csr::has_condition(object, "Approved") => vec![later(rules.signer, Job::Sign(name))],
        (CSRS, true) if is_new => vec![later(rules.approver, Job::Approve(name))],
        ("nodes", false) => vec![later(rules.collector, Job::Collect(text(object, "/metadata/uid").to_owned()))],
        ("namespaces", true) if is_terminating(object) => vec![later(rules.collector, Job::Empty(name))],
        ("namespaces", true) if is_new => vec![later(rules.publisher, Job::Publish(name))],
        ("configmaps", false) if name == "kube-root-ca.crt" && !ends(view, object) => {
            vec![later(rules.publisher, Job::Publish(text(object, "/metadata/namespace").to_owned()))]
        }
        (resource, true) if is_new && OWNED.contains(&resource) => {
            let mut jobs = vec![lost_owner(view, object).and_then(|uid| later(rules.collector, Job::Collect(uid)))];
            if resource == "pods" && rules.scheduler.is_some() && text(object, "/spec/nodeName").is_empty() {
                let bind = Job::Bind(text(object, "/metadata/namespace").to_owned(), name);
                jobs.push(later(Some(Duration::ZERO), bind));
            }
            jobs
        }
        _ => Vec::new(),
    };
    let of_ending = change
        .after
        .is_none()
        .then(|| text(object, "/metadata/namespace"))
        .filter(|space| view.get("namespaces", "", space).is_some_and(|namespace| is_terminating(&namespace)));
    let emptied = of_ending.and_then(|space| later(rules.collector, Job::Empty(space.to_owned())));
    jobs.into_iter().flatten().chain(emptied).collect()
}

/// Whether the object's namespace is terminating or gone.
fn ends(view: &dyn View, object: &Value) -> bool {
    let namespace = view.get("namespaces", "", text(object, "/metadata/namespace"));
    namespace.is_none_or(|namespace| is_terminating(&namespace))
}

fn is_terminating(namespace: &Value) -> bool {
    text(namespace, "/status/phase") == "Terminating"
}

fn lost_owner(view: &dyn View, object: &Value) -> Option<String> {
    let owner = list(object, "/metadata/ownerReferences").iter().find(|owner| text(owner, "/kind") == "Node")?;
    let uid = text(owner, "/uid");
    (!is_node(view, uid)).then(|| uid.to_owned())
}

fn is_node(view: &dyn View, uid: &str) -> bool {
    view.list("nodes").iter().any(|node| text(node, "/metadata/uid") == uid)
}

/// Runs a due job; returns its writes.
pub fn run(view: &dyn View, job: &Job) -> Vec<Write> {
    match job {
        Job::Approve(name) => approve_if_due(view, name),
        Job::Sign(name) => sign(view, name),
        Job::Collect(uid) => collect(view, uid),
        Job::Publish(namespace) => publish(view, namespace),
        Job::Empty(namespace) => empty(view, namespace),
        Job::Bind(namespace, name) => bind(view, namespace, name),
    }
}

fn approve_if_due(view: &dyn View, name: &str) -> Vec<Write> {
    let Some(csr) = view.get(CSRS, "", name) else { return Vec::new() };
    let requestor = Caller {
        name: text(&csr, "/spec/username").to_owned(),
        groups: texts(&csr, "/spec/groups"),
        ..Caller::default()
    };
    let may = |subresource: &str| {
        let asked = AccessAttributes {
            verb: "create".to_owned(),
            resource: CSRS.to_owned(),
            subresource: subresource.to_owned(),
            ..AccessAttributes::default()
        };
        decide(view, &requestor, &asked).is_ok()
    };
    let message = csr::approval(&csr, may);
    message
        .map(|message| put(csr::with_condition(&csr, "Approved", "AutoApproved", message, view.now())))
        .into_iter()
        .collect()
}

fn sign(view: &dyn View, name: &str) -> Vec<Write> {
    let Some(csr) = view.get(CSRS, "", name) else { return Vec::new() };
    let is_done = !text(&csr, "/status/certificate").is_empty();
    if is_done || csr::has_condition(&csr, "Failed") || csr::has_condition(&csr, "Denied") {
        return Vec::new();
    }
    match &view.rules().signer_fails {
        Some(why) => vec![put(csr::with_condition(&csr, "Failed", "SignerValidationFailure", why, view.now()))],
        None => vec![put(csr::sign(&csr, view.rules(), view.now()))],
    }
}

fn put(object: Value) -> Write {
    Write::Put { resource: CSRS.to_owned(), object }
}

/// Adds a condition `Approved`, `Denied`, or `Failed` to a certificate signing request; no writes if it is missing.
pub fn decide_request(view: &dyn View, name: &str, verdict: &str, reason: &str, message: &str) -> Vec<Write> {
    let csr = view.get(CSRS, "", name);
    csr.map(|csr| put(csr::with_condition(&csr, verdict, reason, message, view.now()))).into_iter().collect()
}

/// Approves a certificate signing request as `kubectl certificate approve` does; the signer then signs it.
pub fn approve(view: &dyn View, name: &str) -> Vec<Write> {
    decide_request(view, name, "Approved", "KubectlApprove", "This CSR was approved by kubectl certificate approve.")
}

/// Denies a certificate signing request as `kubectl certificate deny` does.
pub fn deny(view: &dyn View, name: &str) -> Vec<Write> {
    decide_request(view, name, "Denied", "KubectlDeny", "This CSR was denied by kubectl certificate deny.")
}

/// Marks a certificate signing request as failed, as its signer does.
pub fn fail(view: &dyn View, name: &str, why: &str) -> Vec<Write> {
    decide_request(view, name, "Failed", "SignerValidationFailure", why)
}

fn collect(view: &dyn View, uid: &str) -> Vec<Write> {
    if is_node(view, uid) {
        return Vec::new();
    }
    let mut writes = Vec::new();
    for resource in OWNED {
        for object in view.list(resource) {
            let owners = list(&object, "/metadata/ownerReferences");
            if owners.is_empty() || owners.iter().any(|owner| text(owner, "/uid") != uid) {
                continue;
            }
            let effect = match *resource {
                "pods" => deletion::pod(&object, &DeleteOptions::default(), view.now()),
                _ => deletion::other(&object, view.now()),
            };
            writes.extend(deletion_writes(resource, &object, effect));
        }
    }
    writes
}

fn empty(view: &dyn View, namespace: &str) -> Vec<Write> {
    if !view.get("namespaces", "", namespace).is_some_and(|namespace| is_terminating(&namespace)) {
        return Vec::new();
    }
    let (mut writes, mut is_empty) = (Vec::new(), true);
    for kind in KINDS.iter().filter(|kind| kind.is_namespaced && kind.is_stored) {
        for object in view.list(kind.id).iter().filter(|object| text(object, "/metadata/namespace") == namespace) {
            let effect = match kind.kind {
                "Pod" => deletion::pod(object, &DeleteOptions::default(), view.now()),
                _ => deletion::other(object, view.now()),
            };
            is_empty &= matches!(effect, DeleteEffect::Remove(_));
            writes.extend(deletion_writes(kind.id, object, effect));
        }
    }
    if is_empty {
        let (namespace, name) = (String::new(), namespace.to_owned());
        writes.push(Write::Remove { resource: "namespaces".to_owned(), namespace, name });
    }
    writes
}

/// Converts the effect of a DELETE into writes.
pub fn deletion_writes(resource: &str, object: &Value, effect: DeleteEffect) -> Vec<Write> {
    let put = |object| Write::Put { resource: resource.to_owned(), object };
    match effect {
        DeleteEffect::Nothing => Vec::new(),
        DeleteEffect::Update(object) => vec![put(object)],
        DeleteEffect::Remove(before) => {
            let gone = Write::Remove {
                resource: resource.to_owned(),
                namespace: text(object, "/metadata/namespace").to_owned(),
                name: text(object, "/metadata/name").to_owned(),
            };
            before.into_iter().map(put).chain([gone]).collect()
        }
    }
}

/// Objects that every namespace has and this one lacks.
pub fn publish(view: &dyn View, namespace: &str) -> Vec<Write> {
    let object = |kind: &str, name: &str| json!({"kind": kind, "apiVersion": "v1", "metadata": {"name": name, "namespace": namespace}});
    let mut root = object("ConfigMap", "kube-root-ca.crt");
    set(&mut root, "data", json!({"ca.crt": view.rules().authority.certificate}));
    let first = [("configmaps", root), ("serviceaccounts", object("ServiceAccount", "default"))];
    let missing = first
        .into_iter()
        .filter(|(resource, object)| view.get(resource, namespace, text(object, "/metadata/name")).is_none());
    missing.map(|(resource, object)| Write::Put { resource: resource.to_owned(), object }).collect()
}

fn bind(view: &dyn View, namespace: &str, name: &str) -> Vec<Write> {
    let Some(node) = &view.rules().scheduler else { return Vec::new() };
    let request = super::super::view::Request {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        body: Some(json!({"target": {"kind": "Node", "name": node}})),
        ..super::super::view::Request::default()
    };
    pod_verbs::bind(view, &request).map(|reply| reply.writes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{super::tests::FixedView, *};

    fn created(resource: &str, object: &Value) -> Change {
        Change { resource: resource.to_owned(), before: None, after: Some(Arc::new(object.clone())) }
    }

    fn jobs(later: &[DelayedJob]) -> Vec<(Duration, Job)> {
        later.iter().map(|later| (later.after, later.job.clone())).collect()
    }

    /// Spec 10a §12 step 5: approval, then the certificate. AC-10a-21: serving requests need manual approval.
    #[test]
    fn a_request_is_approved_and_then_signed() {
        let usages = &["digital signature", "client auth"];
        let mut asked = csr::tests::request("system:node:n", "system:nodes", &[], usages, "system:bootstrap:a");
        asked["spec"]["groups"] = json!(["system:bootstrappers"]);
        let view = FixedView::with(&[(CSRS, asked.clone())]);
        assert_eq!(jobs(&react(&view, &created(CSRS, &asked))), [(Duration::ZERO, Job::Approve("csr-x".to_owned()))]);
        let writes = run(&view, &Job::Approve("csr-x".to_owned()));
        let [Write::Put { object: approved, .. }] = writes.as_slice() else { panic!("{writes:?}") };
        assert_eq!(approved["status"]["conditions"][0]["reason"], "AutoApproved");
        let change = Change { before: Some(Arc::new(asked.clone())), ..created(CSRS, approved) };
        assert_eq!(jobs(&react(&view, &change)), [(Duration::ZERO, Job::Sign("csr-x".to_owned()))]);
        let mut view = FixedView::with(&[(CSRS, approved.clone())]);
        let writes = run(&view, &Job::Sign("csr-x".to_owned()));
        let [Write::Put { object: signed, .. }] = writes.as_slice() else { panic!("{writes:?}") };
        assert!(!text(signed, "/status/certificate").is_empty());
        view.rules.signer_fails = Some("no".to_owned());
        let writes = run(&view, &Job::Sign("csr-x".to_owned()));
        assert!(matches!(writes.as_slice(), [Write::Put { object, .. }] if csr::has_condition(object, "Failed")));
        asked["spec"]["signerName"] = json!(csr::SERVING_SIGNER);
        let view = FixedView::with(&[(CSRS, asked)]);
        assert_eq!(run(&view, &Job::Approve("csr-x".to_owned())), []);
        let by_hand = approve(&view, "csr-x");
        assert!(matches!(by_hand.as_slice(), [Write::Put { object, .. }] if csr::has_condition(object, "Approved")));
        assert!(
            matches!(deny(&view, "csr-x").as_slice(), [Write::Put { object, .. }] if csr::has_condition(object, "Denied"))
        );
        assert_eq!(fail(&view, "gone", "no"), []);
    }

    #[test]
    fn what_a_node_owned_goes_with_it() {
        let owned = |name: &str, uid: &str| {
            json!({"metadata": {"name": name, "ownerReferences": [{"kind": "Node", "name": "n", "uid": uid}]},
            "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}})
        };
        let view = FixedView::with(&[
            ("nodes", json!({"metadata": {"name": "n", "uid": "new"}})),
            ("leases.coordination.k8s.io", owned("n", "old")),
            ("csinodes.storage.k8s.io", owned("n", "new")),
            ("pods", owned("mirror", "old")),
        ]);
        let gone = Change {
            resource: "nodes".to_owned(),
            before: Some(Arc::new(json!({"metadata": {"name": "n", "uid": "old"}}))),
            after: None,
        };
        assert_eq!(jobs(&react(&view, &gone)), [(Duration::from_secs(1), Job::Collect("old".to_owned()))]);
        let writes = run(&view, &Job::Collect("old".to_owned()));
        assert!(
            matches!(&writes[0], Write::Remove { resource, .. } if resource == "leases.coordination.k8s.io"),
            "{writes:?}"
        );
        assert!(
            matches!(&writes[1], Write::Put { object, .. } if object["metadata"]["deletionGracePeriodSeconds"] == 30)
        );
        assert_eq!(writes.len(), 2);
        assert_eq!(run(&view, &Job::Collect("new".to_owned())), []);
        let late = created("leases.coordination.k8s.io", &owned("n", "old"));
        assert_eq!(jobs(&react(&view, &late)).len(), 1, "an owner that is gone already");
    }

    #[test]
    fn a_namespace_gets_what_belongs_to_it() {
        let mut view =
            FixedView::with(&[("serviceaccounts", json!({"metadata": {"name": "default", "namespace": "a"}}))]);
        let later = react(&view, &created("namespaces", &json!({"metadata": {"name": "a"}})));
        assert_eq!(jobs(&later), [(Duration::ZERO, Job::Publish("a".to_owned()))]);
        let writes = run(&view, &later[0].job);
        let [Write::Put { object, .. }] = writes.as_slice() else { panic!("{writes:?}") };
        assert!(text(object, "/data/ca.crt").starts_with("-----BEGIN CERTIFICATE"));
        view.rules.publisher = None;
        assert!(react(&view, &created("namespaces", &json!({"metadata": {"name": "a"}}))).is_empty());
    }

    #[test]
    fn a_namespace_goes_when_it_is_empty() {
        let ending = json!({"metadata": {"name": "a"}, "status": {"phase": "Terminating"}});
        let pod = json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}});
        let map = json!({"metadata": {"name": "m", "namespace": "a"}});
        let view =
            FixedView::with(&[("namespaces", ending.clone()), ("pods", pod.clone()), ("configmaps", map.clone())]);
        assert_eq!(
            jobs(&react(&view, &created("namespaces", &ending))),
            [(Duration::from_secs(1), Job::Empty("a".to_owned()))]
        );
        let writes = run(&view, &Job::Empty("a".to_owned()));
        assert!(matches!(writes.as_slice(), [Write::Put { .. }, Write::Remove { .. }]), "{writes:?}");
        let gone = Change { resource: "pods".to_owned(), before: Some(Arc::new(pod)), after: None };
        assert_eq!(jobs(&react(&view, &gone)), [(Duration::from_secs(1), Job::Empty("a".to_owned()))]);
        let view = FixedView::with(&[("namespaces", ending), ("configmaps", map)]);
        let writes = run(&view, &Job::Empty("a".to_owned()));
        assert!(
            matches!(writes.as_slice(), [_, Write::Remove { resource, .. }] if resource == "namespaces"),
            "{writes:?}"
        );
    }

    #[test]
    fn pods_are_bound_if_a_scheduler_is_configured() {
        let pod = json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {}});
        let mut view = FixedView::with(&[("pods", pod.clone())]);
        assert!(react(&view, &created("pods", &pod)).is_empty());
        view.rules.scheduler = Some("n".to_owned());
        let later = react(&view, &created("pods", &pod));
        let writes = run(&view, &later[0].job);
        assert!(
            matches!(writes.as_slice(), [Write::Put { object, .. }] if object["spec"]["nodeName"] == "n"),
            "{writes:?}"
        );
    }
}
