//! Port of Kubernetes events: event values and the `EventSink` that records them.

use std::{borrow::Cow, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use berth_types::{PodRef, api};

/// Type of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// An expected occurrence.
    Normal,
    /// An occurrence that may need an operator's attention.
    Warning,
}

/// Object that an event involves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventTarget {
    /// A pod, or one of its containers (`spec.containers{web}`).
    Pod {
        /// Pod that the event is about, also where the field path names a container.
        pod: PodRef,
        /// Field path within the pod.
        field_path: Option<String>,
    },
    /// Node of this agent; the recorder adds its name.
    Node,
    /// A PersistentVolumeClaim or PersistentVolume.
    Storage {
        /// `PersistentVolumeClaim` or `PersistentVolume`.
        kind: &'static str,
        /// Namespace; empty for a PersistentVolume.
        namespace: String,
        /// Object name.
        name: String,
        /// Object UID.
        uid: String,
    },
}

/// An event for the recorder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventRecord {
    /// Involved object.
    pub target: EventTarget,
    /// Normal or warning.
    pub kind: EventKind,
    /// Reason, `CamelCase`.
    pub reason: Cow<'static, str>,
    /// Message for people.
    pub message: String,
    /// Annotations of the event itself.
    pub annotations: Vec<(&'static str, String)>,
}

impl EventRecord {
    /// A normal event on a pod.
    pub fn normal(pod: &PodRef, reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::on_pod(pod, EventKind::Normal, reason, message)
    }

    /// A warning on a pod.
    pub fn warning(pod: &PodRef, reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::on_pod(pod, EventKind::Warning, reason, message)
    }

    /// An event on a PersistentVolumeClaim.
    pub fn on_claim(
        claim: &api::PersistentVolumeClaim,
        kind: EventKind,
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(stored("PersistentVolumeClaim", &claim.metadata), kind, reason, message)
    }

    /// An event on a PersistentVolume.
    pub fn on_volume(
        volume: &api::PersistentVolume,
        kind: EventKind,
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(stored("PersistentVolume", &volume.metadata), kind, reason, message)
    }

    /// A warning on the node.
    pub fn node_warning(reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(EventTarget::Node, EventKind::Warning, reason, message)
    }

    /// A normal event on the node.
    pub fn node_normal(reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(EventTarget::Node, EventKind::Normal, reason, message)
    }

    /// The same event on a field of the pod, e.g. `spec.containers{web}`.
    #[must_use]
    pub fn at(mut self, path: impl Into<String>) -> Self {
        if let EventTarget::Pod { field_path, .. } = &mut self.target {
            *field_path = Some(path.into());
        }
        self
    }

    /// The same event with annotations.
    #[must_use]
    pub fn annotated(mut self, annotations: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        self.annotations.extend(annotations);
        self
    }

    fn on_pod(pod: &PodRef, kind: EventKind, reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(EventTarget::Pod { pod: pod.clone(), field_path: None }, kind, reason, message)
    }

    fn new(
        target: EventTarget,
        kind: EventKind,
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self { target, kind, reason: reason.into(), message: message.into(), annotations: Vec::new() }
    }
}

fn stored(kind: &'static str, metadata: &ObjectMeta) -> EventTarget {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    EventTarget::Storage {
        kind,
        namespace: text(&metadata.namespace),
        name: text(&metadata.name),
        uid: text(&metadata.uid),
    }
}

/// Records events. Never blocks; may drop events on overload.
pub trait EventSink: Send + Sync + 'static {
    /// Records one event.
    fn record(&self, event: EventRecord);
}

impl<T: EventSink + ?Sized> EventSink for Arc<T> {
    fn record(&self, event: EventRecord) {
        (**self).record(event);
    }
}
